"""Data of four kinds, text, images, audio and any bytes: files to bytes and back, stores, the loader.

May import common, patterns, attention and model.
"""
