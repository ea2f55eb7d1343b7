"""Who signs and who is believed: a key in a file, a key in a token (PKCS#11), or an identity (Sigstore).

Each is one call of the OpenSSF model-signing library. An identity needs the network: Sigstore gives a certificate for
some minutes and logs the signature in public; the two others ask nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SigningError(Exception):
    """Signing or checking can't be done here; the text is a sentence for people."""


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A private elliptic-curve key (P-256, P-384, P-521) in a PEM file."""

    path: Path
    password: str | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A private key that never leaves a hardware token: `pkcs11:token=...;object=...`."""

    uri: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Whoever logs in with Sigstore, or the machine's own identity in a CI job (`ambient`)."""

    ambient: bool = False
    token: str | None = None


@dataclass(frozen=True, slots=True)
class PublicKey:
    """The public half of a key file's or a token's key."""

    path: Path


@dataclass(frozen=True, slots=True)
class Believed:
    """An identity (mail address or workflow), and the one who says that it is."""

    identity: str
    issuer: str


Signer = KeyFile | Token | Identity
Verifier = PublicKey | Believed


def library() -> Any:
    """Raises SigningError where model-signing is not installed."""
    try:
        import model_signing
    except ImportError as error:
        raise SigningError(
            f"needs model-signing ({error}); `pip install model-signing pyOpenSSL` brings it."
        ) from None
    return model_signing


def signing(signer: Signer, library: Any) -> Any:
    """The library's configuration that signs as `signer`. Raises SigningError."""
    config = library.signing.Config()
    try:
        match signer:
            case KeyFile(path, password):
                return config.use_elliptic_key_signer(private_key=path, password=password)
            case Token(uri):
                return config.use_pkcs11_signer(pkcs11_uri=uri)
            case Identity(ambient, token):
                return config.use_sigstore_signer(use_ambient_credentials=ambient, identity_token=token)
    except Exception as error:  # the library raises many kinds: of keys, drivers, network
        raise SigningError(f"{_named(signer)}: {first_sentence(error)}.") from None


def verifying(verifier: Verifier, library: Any) -> Any:
    """The library's configuration that believes `verifier`. Raises SigningError."""
    config = library.verifying.Config()
    try:
        match verifier:
            case PublicKey(path):
                return config.use_elliptic_key_verifier(public_key=path)
            case Believed(identity, issuer):
                return config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer)
    except Exception as error:
        raise SigningError(f"{_named(verifier)}: {first_sentence(error)}.") from None


def _named(who: Signer | Verifier) -> str:
    match who:
        case KeyFile(path, _):
            return f"{path}: not a private key of a NIST curve that can be read"
        case PublicKey(path):
            return f"{path}: not a public key of a NIST curve that can be read"
        case Token():
            return "the key in the token can't be used (PKCS#11)"
        case _:
            return "Sigstore can't be used"


def first_sentence(error: Exception) -> str:
    """What a library's error says first; its further sentences point to pages of its own."""
    said = " ".join(str(error).split()).partition(". ")[0]
    return (said or type(error).__name__).rstrip(".")[:300]
