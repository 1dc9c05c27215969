"""Data of four kinds: text, images, audio and any bytes."""
