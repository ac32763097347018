"""The model: loading (`loader`), the forward pass (`transformer`) and what it is made of."""

from engine.model.loader import LoadedModel, ModelLoadError, load_model

__all__ = ["LoadedModel", "ModelLoadError", "load_model"]
