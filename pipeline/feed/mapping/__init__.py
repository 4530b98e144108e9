"""The user's functions of a recipe (`Map`) on the columns of a batch, in threads or processes."""
