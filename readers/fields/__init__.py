"""What is known of one kind of field; today images: headers, facts, checks."""
