"""DSSE envelopes: a statement with a signature by an elliptic-curve key, as in-toto's tools read them.

What is signed is `DSSEv1 LENGTH TYPE LENGTH BODY`, by ECDSA with the SHA-2 of the curve's size. The key's id is the
sha256 of its public half in DER. Form: https://github.com/secure-systems-lab/dsse/blob/master/envelope.md
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.verify.questions.signers import first_sentence
from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.bounded_json import BadJsonError
from shardmill.verify.reading.manifest import canonical

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

IN_TOTO = "application/vnd.in-toto+json"
SIGNATURES_MAX = 64


class KeyFileError(Exception):
    """A key can't be used; the text is a sentence for people."""


class BadEnvelopeError(Exception):
    """No envelope, or none that a given key signed; the text says which."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An envelope that one of the given keys signed."""

    statement: dict[str, Any]
    body: bytes  # the statement as it was signed
    key: str  # the id of the key


def private_key(path: Path, password: str | None) -> EllipticCurvePrivateKey:
    """The key in a PEM file. Raises KeyFileError."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), password.encode() if password else None)
    except (ValueError, TypeError, OSError) as error:
        raise KeyFileError(f"{path}: not a private key that can be read: {first_sentence(error)}.") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise KeyFileError(f"{path}: not a private key of a NIST curve (P-256, P-384, P-521).")
    return key


def public_key(path: Path) -> EllipticCurvePublicKey:
    """The key in a PEM file. Raises KeyFileError."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(path.read_bytes())
    except (ValueError, OSError) as error:
        raise KeyFileError(f"{path}: not a public key that can be read: {first_sentence(error)}.") from None
    if not isinstance(key, EllipticCurvePublicKey):
        raise KeyFileError(f"{path}: not a public key of a NIST curve (P-256, P-384, P-521).")
    return key


def seal(body: bytes, key: EllipticCurvePrivateKey) -> bytes:
    """The envelope of a statement's JSON, one line."""
    from cryptography.hazmat.primitives.asymmetric import ec

    signature = key.sign(_signed(IN_TOTO, body), ec.ECDSA(_hash_of(key.curve.key_size)))
    return canonical(
        {
            "payloadType": IN_TOTO,
            "payload": base64.b64encode(body).decode(),
            "signatures": [{"keyid": key_id(key.public_key()), "sig": base64.b64encode(signature).decode()}],
        }
    )


def unseal(data: bytes, keys: list[EllipticCurvePublicKey]) -> Opened:
    """The statement in an envelope that one of the keys signed. Raises BadEnvelopeError."""
    kind, body, signatures = _parts(data)
    for key in keys:
        if any(_fits(key, signature, _signed(kind, body)) for signature in signatures):
            return Opened(_statement(body), body, key_id(key))
    raise BadEnvelopeError("none of the given keys signed it")


def key_id(key: EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives import serialization as form

    return hashlib.sha256(
        key.public_bytes(form.Encoding.DER, form.PublicFormat.SubjectPublicKeyInfo)
    ).hexdigest()


def _signed(kind: str, body: bytes) -> bytes:
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(body), body)


def _hash_of(curve_bits: int) -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256() if curve_bits <= 256 else hashes.SHA384() if curve_bits <= 384 else hashes.SHA512()


def _fits(key: EllipticCurvePublicKey, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key.verify(signature, message, ec.ECDSA(_hash_of(key.curve.key_size)))
    except InvalidSignature:
        return False
    return True


def _parts(data: bytes) -> tuple[str, bytes, list[bytes]]:
    """Payload type, payload and signatures. Raises BadEnvelopeError."""
    try:
        value = bounded_json.loads(data)
        kind, rows = value["payloadType"], value["signatures"][:SIGNATURES_MAX]
        body = base64.b64decode(value["payload"], validate=True)
        signatures = [base64.b64decode(row["sig"], validate=True) for row in rows]
    except BadJsonError as error:
        raise BadEnvelopeError(f"it is no JSON: {error}") from None
    except (KeyError, TypeError, ValueError):
        raise BadEnvelopeError("it is no DSSE envelope") from None
    if kind != IN_TOTO:
        raise BadEnvelopeError(f"its payload is {ascii(kind)[:100]}, not {IN_TOTO}")
    return kind, body, signatures


def _statement(body: bytes) -> dict[str, Any]:
    try:
        value = bounded_json.loads(body)
    except BadJsonError as error:
        raise BadEnvelopeError(f"its statement is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadEnvelopeError("its statement is no JSON object")
    return value
