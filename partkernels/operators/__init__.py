"""The operators, one per file, with argument checks, schema and gradient."""
