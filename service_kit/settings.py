"""Settings of a service: defaults → TOML file → environment → flags, checked by one pydantic model.

Layering is done here rather than by a library because each value's origin is kept: it is part of
every complaint ("env KAITEN_GATEWAY_HTTP_PORT = 'x'") and of the configuration logged at start.
Nothing is ever ignored: a key that no field has, from any layer, ends the start.
"""

import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, PrivateAttr, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from service_kit.errors import ConfigError


class Settings(BaseModel):
    """Base of every service's settings: frozen, strict about keys, remembers origins."""

    # "inf" and "nan" are floats to Python, and a wait of either is none.
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One value as somebody wrote it, and where."""

    value: object
    origin: str


ModelT = TypeVar("ModelT", bound=BaseModel)


def load(
    model: type[ModelT],
    service: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ModelT:
    """Merge the layers and validate. ConfigError says what is wrong and where; `--help` exits."""
    flags = _from_flags(model, service, list(sys.argv[1:] if argv is None else argv))
    given = _from_toml(model, flags.pop("config", None))
    given |= _from_environ(model, service, os.environ if environ is None else environ)
    given |= flags
    try:
        settings = model.model_validate(
            {name: _split(model.model_fields[name], item.value) for name, item in given.items()}
        )
    except ValidationError as error:
        raise ConfigError(_complaint(model, error, given)) from None
    if isinstance(settings, Settings):
        settings._origins.update({name: item.origin for name, item in given.items()})
    return settings


def describe(settings: BaseModel) -> dict[str, object]:
    """Every field with its value and origin, for one log line. Secrets are redacted."""
    origins = settings._origins if isinstance(settings, Settings) else {}
    described: dict[str, object] = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        shown = value if isinstance(value, bool | int | float | None) else str(value)
        fallback = "set" if name in settings.model_fields_set else "default"
        described[name] = {"value": shown, "origin": origins.get(name, fallback)}
    return described


def flag_of(field: str) -> str:
    """`grpc_port` is `--grpc-port`."""
    return "--" + field.replace("_", "-")


def _from_flags(model: type[BaseModel], service: str, argv: list[str]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    rest = iter(argv)
    for token in rest:
        if token in ("--help", "-h"):
            sys.stdout.write(_help(model, service))
            raise SystemExit(0)
        if not token.startswith("--"):
            raise ConfigError(
                f"unexpected argument {token!r}; {service} takes flags only, see --help"
            )
        flag, has_value, value = token.partition("=")
        name = _field_of(model, flag)
        if not has_value:
            value = _next_value(model, name, flag, rest)
        origin = f"flag {flag}"
        if name in given:
            raise ConfigError(f"{flag} is given twice")
        given[name] = Given(value=value, origin=origin)
    return given


def _next_value(model: type[BaseModel], name: str, flag: str, rest: Any) -> str:
    """The text after a flag; switches need none."""
    field = model.model_fields.get(name)
    if field is not None and field.annotation is bool:
        return "true" if flag == flag_of(name) else "false"
    value = next(rest, None)
    if value is None:
        raise ConfigError(f"{flag} needs a value")
    return str(value)


def _field_of(model: type[BaseModel], flag: str) -> str:
    """The field a flag sets. `--no-x` unsets a switch `x`."""
    known = {flag_of(name): name for name in model.model_fields} | {"--config": "config"}
    for name, field in model.model_fields.items():
        if field.annotation is bool:
            known.setdefault("--no-" + name.replace("_", "-"), name)
    if flag not in known:
        raise ConfigError(f"unknown flag {flag}{_did_you_mean(flag, known)} (see --help)")
    return known[flag]


def _from_toml(model: type[BaseModel], path: Given | None) -> dict[str, Given]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(Path(str(path.value)).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path.value}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path.value} is not TOML: {error}") from error
    for key in table:
        if key not in model.model_fields:
            hint = _did_you_mean(key, model.model_fields)
            raise ConfigError(f"{path.value}: unknown key {key!r}{hint}")
    return {key: Given(value=value, origin=f"file {path.value}") for key, value in table.items()}


def _from_environ(
    model: type[BaseModel], service: str, environ: Mapping[str, str]
) -> dict[str, Given]:
    prefix = f"KAITEN_{service.upper()}_"
    known = {prefix + name.upper(): name for name in model.model_fields}
    given: dict[str, Given] = {}
    for key, value in environ.items():
        if not key.startswith(prefix):
            continue
        if key not in known:
            raise ConfigError(f"unknown environment variable {key}{_did_you_mean(key, known)}")
        given[known[key]] = Given(value=value, origin=f"env {key}")
    return given


def _split(field: FieldInfo, value: object) -> object:
    """Text for a field of many values is comma-separated."""
    if isinstance(value, str) and get_origin(field.annotation) in (tuple, list, frozenset):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


def _complaint(model: type[BaseModel], error: ValidationError, given: Mapping[str, Given]) -> str:
    """The first problem as one sentence: where, what was written, the rule, the field."""
    first = error.errors(include_url=False, include_context=False)[0]
    rule = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    rule = rule[:1].lower() + rule[1:]
    name = str(first["loc"][0]) if first["loc"] else ""
    if name not in model.model_fields:
        return rule
    field = model.model_fields[name]
    about = f" ({name}: {field.description})" if field.description else ""
    if name not in given:
        return (
            f"{flag_of(name)} is required{about}"
            if field.is_required()
            else f"{name}: {rule}{about}"
        )
    shown = "…" if _is_secret(field) else repr(given[name].value)
    return f"{given[name].origin} = {shown}: {rule}{about}"


def _is_secret(field: FieldInfo) -> bool:
    return field.annotation is SecretStr or SecretStr in get_args(field.annotation)


def _did_you_mean(text: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(text, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _help(model: type[BaseModel], service: str) -> str:
    lines = [f"usage: {service} [--config FILE] [--flag VALUE ...]", ""]
    if model.__doc__:
        lines += [model.__doc__.strip().splitlines()[0], ""]
    lines += [
        f"Each flag is also KAITEN_{service.upper()}_<FIELD> in the environment and a key of FILE.",
        "",
    ]
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"default {_shown_default(field)}"
        if get_origin(field.annotation) is Literal:
            default = f"{' | '.join(map(str, get_args(field.annotation)))}; {default}"
        lines.append(f"  {_flags_shown(name, field)}  [{default}]")
        if field.description:
            lines.append(f"      {field.description}")
    return "\n".join(lines) + "\n"


def _flags_shown(name: str, field: FieldInfo) -> str:
    """A switch that is on shows how to turn it off."""
    is_on = field.annotation is bool and field.default is True
    flag = flag_of(name)
    return f"{flag} | --no-{flag[2:]}" if is_on else flag


def _shown_default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, SecretStr):
        value = value.get_secret_value()  # what stands in the code is no secret
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return "none" if value is None or value == "" else str(value)
