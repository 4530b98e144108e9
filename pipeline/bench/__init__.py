"""`penstock bench`: what the input side can do, what holds it back, what others do beside it."""
