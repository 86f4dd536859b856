"""The step loop, its process and the client that the API talks to."""
