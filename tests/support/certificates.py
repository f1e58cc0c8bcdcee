"""A certificate authority of the moment, and a certificate of an address of this machine signed by it."""

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey
PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Certificates:
    """Files: what a client trusts, and what a server (or a client) shows."""

    authority: Path
    certificate: Path
    key: Path

    def for_server(self, *, asks_clients: bool = False) -> ssl.SSLContext:
        """What a server needs that shows the certificate, and asks its clients for one if told to."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        if asks_clients:
            context.load_verify_locations(self.authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def new_certificates(folder: Path, host: str = "127.0.0.1") -> Certificates:
    """Make both, valid for an hour."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _signed("tests", authority_key, "tests", authority_key, is_authority=True)
    certificate = _signed(host, key, "tests", authority_key, is_authority=False)
    files = Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    files.authority.write_bytes(authority.public_bytes(PEM))
    files.certificate.write_bytes(certificate.public_bytes(PEM))
    files.key.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return files


def _signed(subject: str, key: Key, issuer: str, issuer_key: Key, *, is_authority: bool) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if not is_authority:
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(subject))])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
