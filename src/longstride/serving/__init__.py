"""Serving: a model behind an HTTP API that OpenAI clients know, and the page to look at it.

May import every room up to pictures. Needs FastAPI and uvicorn: pip install 'longstride[serve]'.
"""
