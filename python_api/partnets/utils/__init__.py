"""What several rooms need, and knows of none of them."""
