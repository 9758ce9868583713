"""Settings that are declared once, in a record or a base class, and shown by all that take them."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import textwrap
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableSequence
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

    def decorate(cls: Class) -> Class:
        init = vars(cls)["__init__"]
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
                raise TypeError(f"{cls.__name__}() has no setting {min(unknown)!r}{hint}")
            init(*args, **kwargs)

        signature = own.replace(parameters=[*explicit, *added])
        checked.__signature__ = signature  # type: ignore[attr-defined]
        checked.__annotations__ = get_type_hints(init) | {p.name: p.annotation for p in added}
        setattr(cls, "__init__", checked)  # noqa: B010 - mypy cannot know which class
        if cls.__doc__:  # not with python -OO
            docs = {name: doc for record in records for name, doc in field_docs(record).items()}
            of_fields = {each.name: docs[each.name] for each in added if each.name in docs}
            cls.__doc__ = _with_arguments(cls.__doc__, _argument_texts(cls) | of_fields)
        return cls

    return decorate


def _with_arguments(doc: str, texts: Mapping[str, str]) -> str:
    """Return a class's docstring with these ``Args``, by name."""
    head, _, after = inspect.cleandoc(doc).partition("\n\nArgs:\n")
    _, gap, rest = after.partition("\n\n")
    entries = [f"    {name}: {text}" for name, text in texts.items()]
    return "\n".join([head, "", "Args:", *entries]) + gap + rest


def show_inherited(cls: type, *, besides: tuple[str, ...] = ()) -> None:
    """Give a class whose ``**settings`` go to its base class the signature and the Args of both.

    So ``help()`` and Sphinx show what the command line shows.

    Args:
        cls: is changed in place.
        besides: settings of the base class that it does not have.
    """
    shown: dict[str, Parameter] = {}
    texts: dict[str, str] = {}
    for each in taking(cls):
        _, *parameters = inspect.signature(each.__init__).parameters.values()  # type: ignore[misc]
        texts = _argument_texts(each) | texts
        shown = {p.name: p for p in parameters if p.kind != Parameter.VAR_KEYWORD} | shown
    shown = {name: parameter for name, parameter in shown.items() if name not in besides}
    cls.__signature__ = inspect.Signature(sorted(shown.values(), key=_place))  # type: ignore[attr-defined]
    if cls.__doc__:
        of_shown = {name: texts[name] for name in shown if name in texts}
        cls.__doc__ = _with_arguments(cls.__doc__, of_shown)


def taking(cls: type) -> list[type]:
    """Return the classes whose constructors take a class's arguments.

    The first is the class itself, or whose constructor it has; as long as one ends in
    ``**settings``, the next one that has a constructor follows.
    """
    found: list[type] = []
    for each in cls.__mro__:
        if "__init__" in vars(each):
            found.append(each)
            parameters = inspect.signature(each.__init__).parameters.values()  # type: ignore[misc]
            if not any(p.kind == Parameter.VAR_KEYWORD for p in parameters):
                break
    return found


def _place(parameter: Parameter) -> tuple[int, bool]:
    """Return by what parameters are ordered: those without a default come first."""
    kind = parameter.kind
    return kind, kind != Parameter.KEYWORD_ONLY and parameter.default is not Parameter.empty


def _argument_texts(cls: type) -> dict[str, str]:
    """Return what a class's docstring says of each argument, however far its lines are indented."""
    after = inspect.cleandoc(cls.__doc__ or "").partition("\n\nArgs:\n")[2]
    texts: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(after.partition("\n\n")[0]).splitlines():
        if line.startswith(" "):
            texts[name] += f"\n    {line}"
        else:
            name, _, text = line.partition(": ")
            texts[name] = text
    return texts


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

    ``torch.load`` of plain values takes no others. A warning tells what a list cannot replace.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: loadable(each) for name, each in value.items()}
    if isinstance(value, tuple | MutableSequence):
        if isinstance(value, deque):
            warnings.warn(
                "a deque, of an optimizer's state or of a setting, is saved as a list, which drops "
                "nothing: a resumed run may have other bits; keep a list or a tensor",
                stacklevel=2,
            )
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
            without ``| None``, a value is only made Python's own (:func:`loadable`).

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
