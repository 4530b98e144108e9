"""What is known of one kind of field; today of images: what their bytes say, and whether they are
good."""
