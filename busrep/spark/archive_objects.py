"""What pyarrow.fs cannot do in an object store: write an object if there is none. The package obstore can."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from busrep.errors import ConfigError, Unavailable

# Of the object stores that pyarrow.fs knows those that write on condition.
SCHEMES = ("s3", "gs", "abfs", "abfss")


def plain(url: str) -> str:
    """The URL without credentials and parameters."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def options_of(url: str) -> dict[str, str]:
    """What a URL for pyarrow.fs says of credentials, region and endpoint, under the names that obstore and deltalake
    have for it; what it does not say these find in the environment, or of the machine's role."""
    parts = urlsplit(url)
    if parts.scheme != "s3":
        return {}
    given = dict(parse_qsl(parts.query))
    scheme, endpoint = given.get("scheme", "https"), given.get("endpoint_override")
    found = {
        "aws_access_key_id": unquote(parts.username or "") or given.get("access_key"),
        "aws_secret_access_key": unquote(parts.password or "") or given.get("secret_key"),
        "aws_region": given.get("region"),
        "aws_endpoint": f"{scheme}://{endpoint}" if endpoint else None,
        "aws_allow_http": "true" if scheme == "http" else None,
    }
    return {name: value for name, value in found.items() if value}


def put_new(url: str, name: str, content: bytes, shown: str) -> bool | None:
    """Write the object ``name`` below ``url``; False when there is one. None: this store, or this machine without the
    package obstore, cannot. Raises ConfigError, Unavailable."""
    if urlsplit(url).scheme not in SCHEMES:
        return None
    try:
        import obstore
        from obstore import exceptions
        from obstore.store import from_url
    except ImportError:
        return None
    options: Any = options_of(url)
    try:
        http = options.pop("aws_allow_http", None) is not None
        store = from_url(plain(url), config=options, client_options={"allow_http": http})
        obstore.put(store, name, content, mode="create", use_multipart=False)
    except exceptions.AlreadyExistsError:
        return False
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise ConfigError(f"{shown} cannot be used: {first_line(error)}") from None
    except exceptions.BaseError as error:
        raise Unavailable(shown, first_line(error)) from None
    return True


def first_line(error: BaseException) -> str:
    """Of what it says: what follows is its insides."""
    return (str(error).splitlines() or [type(error).__name__])[0]
