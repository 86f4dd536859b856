"""The cheap checks that public ops make on their inputs: shapes, dtypes, layout. None of them waits for a device."""

from torch import Tensor, dtype


def check_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Raise ValueError unless the tensor has this shape; None stands for any length."""
    actual = tensor.shape
    if len(actual) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, actual, strict=True)
    ):
        return
    wanted = ", ".join("any" if want is None else str(want) for want in shape)
    raise ValueError(f"{name} has shape {list(actual)}; it must be [{wanted}].")


def check_dtype(name: str, tensor: Tensor, *dtypes: dtype) -> None:
    """Raise ValueError unless the tensor has one of these dtypes."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}.")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous. Call .contiguous() on it.")
