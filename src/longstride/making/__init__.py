"""What lies between a network that makes bytes and a person who wants text, images or sound."""
