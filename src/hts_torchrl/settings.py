"""Settings that are declared once, in a record, and taken by name by the classes that use them."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence
from inspect import Parameter
from numbers import Real
from typing import Any, TypeVar, get_type_hints

import numpy as np

from hts_torchrl.errors import require

Class = TypeVar("Class", bound=type)


def takes_settings(
    *records: type, besides: Collection[str] = (), silently: Collection[str] = ()
) -> Callable[[Class], Class]:
    """Give a class that passes ``**settings`` to records the records' signature and help.

    ``inspect.signature``, ``help()``, Sphinx and the command line then show every field of a
    record as a keyword argument, with its type, default and docstring. A keyword that is neither
    the class's nor a record's is refused, with the nearest that is known.

    Static types end here: ``Unpack[TypedDict]`` would need every name and type a second time. The
    records refuse wrong values when they are built.

    Args:
        records: dataclasses with keyword-only fields, each followed by a docstring.
        besides: fields that the class sets itself, and its callers cannot.
        silently: further keywords that the class takes, and that neither signature nor help show.
    """

    def decorate(taking: Class) -> Class:
        init = vars(taking)["__init__"]
        own = inspect.signature(init)
        added = [
            each.replace(annotation=get_type_hints(record)[name])
            for record in records
            for name, each in inspect.signature(record).parameters.items()
            if name not in {*own.parameters, *besides}
        ]
        explicit = [each for each in own.parameters.values() if each.kind != Parameter.VAR_KEYWORD]
        known = {each.name for each in (*explicit, *added)}

        @functools.wraps(init)
        def checked(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            if unknown := kwargs.keys() - known - {*silently}:
                nearest = difflib.get_close_matches(min(unknown), known, n=1)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
                raise TypeError(f"{taking.__name__}() has no setting {min(unknown)!r}{hint}")
            init(*args, **kwargs)

        signature = own.replace(parameters=[*explicit, *added])
        checked.__signature__ = signature  # type: ignore[attr-defined]
        checked.__annotations__ = get_type_hints(init) | {p.name: p.annotation for p in added}
        setattr(taking, "__init__", checked)  # noqa: B010 - mypy cannot know which class
        taking.__doc__ = _with_arguments(taking.__doc__, records, [each.name for each in added])
        return taking

    return decorate


def _with_arguments(doc: str | None, records: Iterable[type], names: list[str]) -> str | None:
    """Add the docstrings of fields to the ``Args`` of a class."""
    if doc is None:  # python -OO
        return None
    docs = {name: text for record in records for name, text in field_docs(record).items()}
    lines = "".join(f"\n    {name}: {docs[name]}" for name in names if name in docs)
    doc = inspect.cleandoc(doc)
    before, args, after = doc.partition("\nArgs:\n")
    own, gap, rest = after.partition("\n\n")
    return f"{before}{args}{own}{lines}{gap}{rest}"


def field_docs(record: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, its bases' first, in one line each."""
    docs: dict[str, str] = {}
    for each in filter(dataclasses.is_dataclass, reversed(record.__mro__)):
        try:
            source = textwrap.dedent(inspect.getsource(each))
        except (OSError, TypeError):  # without its source
            continue
        (tree,) = ast.parse(source).body
        for field, doc in itertools.pairwise(tree.body):  # type: ignore[attr-defined]
            match field, doc:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def loadable(value: Any) -> Any:  # noqa: ANN401 - a setting, or a part of a checkpoint
    """Return a value in which numpy's numbers and OmegaConf's containers are Python's own.

    ``torch.load`` of plain values takes no others.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: loadable(each) for name, each in value.items()}
    if isinstance(value, tuple | MutableSequence):
        several = [loadable(each) for each in value]
        return tuple(several) if isinstance(value, tuple) else several
    return value


_WANTED = {"int": "a whole number", "float": "a number", "bool": "True or False"}


def plain_value(name: str, value: Any, kind: str) -> Any:  # noqa: ANN401 - a setting
    """Return a setting as Python's own, of the type that it is declared with: 1e6 as an integer.

    Args:
        name: of the setting, for the message.
        value: that it was given.
        kind: its type as it is annotated; of others than ``int``, ``float`` and ``bool``, with or
            without ``| None``, a value stays as it is.

    Raises:
        ConfigurationError: naming the setting, for a value of another type.
    """
    value, needed = loadable(value), kind.removesuffix(" | None")
    if needed not in _WANTED or (value is None and needed != kind):
        return value
    if needed == "float":
        fits = hasattr(type(value), "__float__")  # a tensor has it, and text has not
    elif needed == "bool":
        fits = isinstance(value, Real) and value in (0, 1)
    else:
        fits = isinstance(value, Real) and value % 1 == 0
    is_short = isinstance(value, str | Real | None)
    told = f"{name}={value!r}" if is_short else f"{name} of type {type(value).__name__}"
    require(fits, told, _WANTED[needed])
    return int(value) if needed == "int" and not isinstance(value, int) else value
