"""Saves and restores the attributes that a method declares as its state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor

from cfl.runtime.errors import ConfigError

_PLAIN = (bool, int, float, str, bytes, type(None))


def declared_state(kind: type) -> dict[str, str]:
    """Key in a checkpoint -> attribute, as declared by a class and its base classes, base classes first.

    Raises:
        TypeError: a declaration is no tuple of names, or two attributes would be saved under one key.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        declared = vars(base).get("state", ())
        if isinstance(declared, str) or not isinstance(declared, Collection) or not _are_names(declared):
            raise TypeError(f"{base.__name__}.state = {declared!r}: a tuple of names is needed")
        named = declared.items() if isinstance(declared, Mapping) else ((name.lstrip("_"), name) for name in declared)
        for key, attribute in named:
            if found.setdefault(key, attribute) != attribute:
                raise TypeError(f"{kind.__name__} saves both {found[key]} and {attribute} under {key!r}")
    return found


def _are_names(declared: Collection[Any]) -> bool:
    values = declared.values() if isinstance(declared, Mapping) else ()
    return all(isinstance(name, str) for name in (*declared, *values))


def save(owner: object) -> dict[str, Any]:
    """The values of an object's declared state by key, as a checkpoint holds them.

    Containers are copied, tensors are not. A set becomes a sorted list. An object with ``state_dict`` is replaced by
    the result of calling it.

    Raises:
        TypeError: an attribute holds or contains something else than tensors and plain values.
    """
    found = {}
    for key, attribute in declared_state(type(owner)).items():
        value = attrgetter(attribute)(owner)
        try:
            found[key] = sorted(value) if _is_set(value) else _copied(value)
        except TypeError as error:
            raise TypeError(f"{type(owner).__name__}.state names {attribute}, which cannot be saved: {error}") from None
    return found


def restore(owner: object, state: Mapping[str, Any]) -> None:
    """Give an object's declared attributes the values that :func:`save` returned.

    An attribute that holds a set becomes a set again. If the attribute's object has ``load_state_dict``, it is called.

    Raises:
        ConfigError: ``ckpt_path``; the class declares a key that was not saved.
    """
    for key, attribute in declared_state(type(owner)).items():
        if key not in state:
            value = f"a checkpoint without {key}, which {type(owner).__name__}.state names"
            raise ConfigError("ckpt_path", value, "one that this version of the class has saved")
        path, _, name = attribute.rpartition(".")
        holder = attrgetter(path)(owner) if path else owner
        present = getattr(holder, name)
        if hasattr(present, "load_state_dict"):
            present.load_state_dict(state[key])
        else:
            setattr(holder, name, type(present)(state[key]) if _is_set(present) else _copied(state[key]))


def check_declaration(key: str, kind: type) -> None:
    """Refuse a declaration that is no tuple of names, or that would lose something.

    Args:
        key: the method's key in the configuration.
        kind: its class.

    Raises:
        ConfigError: naming the class and the declaration.
    """
    try:
        declared_state(kind)
    except TypeError as error:
        valid = f"a tuple of names of attributes, each saved under a key of its own ({error})"
        raise ConfigError(key, f"{kind.__name__}.state = {getattr(kind, 'state', None)!r:.60}", valid) from None


def check(key: str, owner: object) -> None:
    """Refuse the declaration of an attribute that does not exist, or that cannot be saved.

    Args:
        key: the method's key in the configuration.
        owner: the method, after its ``setup``.

    Raises:
        ConfigError: naming the class and the attribute.
    """
    kind = type(owner).__name__
    for attribute in declared_state(type(owner)).values():
        try:
            attrgetter(attribute)(owner)
        except AttributeError:
            valid = f"names of attributes that {kind} has after setup"
            raise ConfigError(key, f"{kind}.state with {attribute}", valid) from None
    try:
        save(owner)
    except TypeError as error:
        valid = "names of attributes that hold tensors, plain values, and dicts, lists and tuples of these"
        raise ConfigError(key, f"{kind}.state", f"{valid} ({error})") from None


def check_copies(who: str, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a state that holds tensors of the global model, whose values change with every round.

    Args:
        who: the method, for the message.
        state: result of its ``state_dict``.
        tensors: name -> tensor of the global model.

    Raises:
        TypeError: naming the method, the key of the state and the tensor.
    """
    places = {_place(tensor): name for name, tensor in tensors.items() if tensor.numel()}
    for key, value in state.items():
        if found := next((places[at] for at in map(_place, _tensors(value)) if at in places), None):
            holds = f"{who}: state holds, in {key}, {found} of the global model itself"
            raise TypeError(f"{holds}, which changes with every round; keep a copy, tensor.detach().clone()")


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.numel():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for element in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(element)


def _is_set(value: Any) -> bool:
    return isinstance(value, set | frozenset)


def _copied(value: Any) -> Any:
    """A value with copied containers, and objects replaced by their ``state_dict``."""
    if isinstance(value, Mapping):
        return {key: _copied(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_copied(element) for element in value]
    if isinstance(value, tuple):
        return tuple(_copied(element) for element in value)
    if _is_set(value):  # refused: when restored, it could not be told from a list
        raise TypeError("a set within a container cannot be restored: make it an attribute of its own")
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if type(value) not in _PLAIN and not isinstance(value, Tensor):  # the checkpoint could not be read again
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is no tensor and no plain value")
    return value
