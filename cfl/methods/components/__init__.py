"""Mathematics and base classes that several methods share."""
