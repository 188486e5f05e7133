# SPDX-License-Identifier: Apache-2.0
"""How many bytes a cache of another library really holds: every tensor that can be reached from it, each memory once."""


def tensors_in(thing, seen=None):
    """All tensors that can be reached from an object through attributes, lists and dictionaries. A quantised tensor that
    wraps others is those others."""
    seen = {} if seen is None else seen
    if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type(None), type)):
        return
    seen[id(thing)] = thing  # keeps it alive, for another object could get its id
    if hasattr(thing, "__tensor_flatten__") and hasattr(thing, "untyped_storage"):
        names, _ = thing.__tensor_flatten__()
        for name in names:
            yield from tensors_in(getattr(thing, name), seen)
    elif hasattr(thing, "untyped_storage"):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value, seen)
    elif isinstance(thing, (list, tuple, set)):
        for value in thing:
            yield from tensors_in(value, seen)
    elif hasattr(thing, "__dict__"):
        yield from tensors_in(vars(thing), seen)


def held_bytes(*things):
    """A view of a larger memory holds all of that memory; two views of one memory count once."""
    memories = {}
    for tensor in tensors_in(list(things)):
        memory = tensor.untyped_storage()
        memories[memory.data_ptr()] = memory.nbytes()
    return sum(memories.values())
