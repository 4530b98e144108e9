"""Remote stores: what every store can do, and the stores behind each kind of URL."""
