from microturn.triton.adapter import TritonPythonModel

__all__ = ["TritonPythonModel"]
