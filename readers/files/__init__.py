"""Files of our own: their names, how they appear whole, and how Arrow files are read strictly."""
