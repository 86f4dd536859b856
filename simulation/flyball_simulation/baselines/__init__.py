"""What tuners are compared with."""
