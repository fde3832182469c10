"""The operators, a file each: how it is called and checked, its schema, and its gradient."""
