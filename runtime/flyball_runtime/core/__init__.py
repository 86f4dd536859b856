"""Types that every layer shares. Nothing here imports torch."""
