"""Decide which TLS certificates are trusted, and explain why one isn't.

Another attempt doesn't repair a certificate, so its faults are final.
"""

from __future__ import annotations

import os
import re
import ssl
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

CERTIFICATE_REMEDY = (
    "Give the authority that signed it in storage_options, as "
    'root_certificate="/path/ca.crt" (or verify=), and use the host name of the certificate in the '
    "URL or endpoint_url; verify=False trusts any server."
)
_BEGIN = "-----BEGIN CERTIFICATE-----"
_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SUFFIXES = (".crt", ".pem", ".cer", ".0")
# rustls's words, as obstore passes them on.
_RUSTLS = re.compile(
    r"(?:invalid peer certificate: (?:certificate )?|InvalidCertificate\(\s*)([A-Za-z ]+)|"
    r"(certificate (?:expired|not valid)[^,;()]*)"
)


def certificates(value: Any, name: str) -> bytes:
    """Return the PEM of certificate authorities, given as text or bytes, or as the path of a file
    or folder. name: of the option, for the error. Raises ConfigError."""
    pem = b""
    if isinstance(value, bytes) and _BEGIN.encode() in value:
        pem = value
    elif isinstance(value, str) and _BEGIN in value:
        pem = value.encode()
    elif isinstance(value, str | bytes | os.PathLike):
        try:
            pem = b"\n".join(_files(os.fsdecode(os.path.expanduser(value))))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"storage_options: {name}: the certificates can't be read ({reason}). Wanted the "
                "path of a file (or a folder of files) in PEM format, or its text."
            ) from None
    else:
        raise ConfigError(
            f"storage_options: {name}: got a {type(value).__name__}, wanted the path of a file in "
            "PEM format, or its text."
        )
    pem = b"\n".join(_BLOCK.findall(pem)) + b"\n"  # some files hold comments in any encoding
    try:
        ssl.create_default_context(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            f"storage_options: {name}: found no certificates in PEM format. Wanted a file with "
            f"{_BEGIN} in it (openssl x509 -inform der -in FILE makes one of a DER file)."
        ) from None
    return pem


def _files(path: str) -> Iterator[bytes]:
    if os.path.isdir(path):
        for name in sorted(os.listdir(path)):
            if name.endswith(_SUFFIXES):
                yield from _files(os.path.join(path, name))
        return
    with open(path, "rb") as file:
        yield file.read()


def tls_context(*, own: str | bytes | None, anybody: bool) -> ssl.SSLContext:
    """Create the context of TLS connections.

    own: PEM of authorities that are trusted in addition to the system's; anybody: trust any server.
    """
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if paths.cafile is None and paths.capath is None:  # a Python without the system's store
        try:
            import certifi
        except ImportError:
            pass
        else:
            context.load_verify_locations(cafile=certifi.where())
    if own is not None:
        context.load_verify_locations(cadata=own.decode() if isinstance(own, bytes) else own)
    if anybody:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def certificate_fault(error: BaseException) -> str | None:
    """Return the fault of the server's certificate or TLS; None if the error has another cause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate isn't accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        reason = (error.reason or "").replace("_", " ").lower()
        if "wrong version number" in reason or "http request" in reason:
            return "the server doesn't speak TLS at this port: use http://, or another port"
        if "alert" in reason or "unsupported" in reason or "no shared cipher" in reason:
            return f"the TLS handshake failed: {reason}"
    return None


def certificate_fault_of(text: str) -> str | None:
    """Return the certificate fault that a message of obstore contains; None without one."""
    found = _RUSTLS.search(text)
    if found is None:
        if "InvalidContentType" in text or "received corrupt message" in text:
            return "the server doesn't speak TLS at this port: use http://, or another port"
        return None
    # rustls's names of faults, such as UnknownIssuer, as words.
    fault = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", (found[1] or found[2]).strip()).lower()
    return f"the server's certificate isn't accepted: {fault}"
