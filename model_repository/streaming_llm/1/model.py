from microturn.triton_adapter import TritonPythonModel

__all__ = ["TritonPythonModel"]
