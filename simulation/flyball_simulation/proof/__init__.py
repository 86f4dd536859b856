"""The proof: contenders on a matrix of cells and on named scenarios, and the page that comes of it (``make proof``)."""
