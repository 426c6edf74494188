"""Sites in memory with policies and keys, and everything that they send."""

from dataclasses import dataclass, field

from consilience.flower import client_app
from support.flower_grid import World
from support.secure_sums import authority_folder, identity


def content_of(reply):
    """All bytes of a message: its payload and its packed records; of an error its text."""
    if reply.has_error():
        return (reply.error.reason or "").encode()
    records = [record["record"].data for record in reply.content.array_records.values()]
    return reply.content.config_records["payload"]["json"].encode() + b"".join(records)


@dataclass
class Sites(World):
    """A `World` whose sites have the `policies`, TOML texts by name, and whose sums are secure if it is. `sent` are
    (site, kind of message, bytes) of all replies, and `received` of all requests."""

    policies: dict[str, str] = field(default_factory=dict)
    secure: bool = False
    sent: list[tuple[str, str, bytes]] = field(default_factory=list)
    received: list[tuple[str, str, bytes]] = field(default_factory=list)

    def start(self, site):
        settings = {"site": site, "states": str(self.disk(site))}
        if site in self.policies:
            self.disk(site).mkdir(parents=True, exist_ok=True)
            settings["policy"] = str(self.disk(site) / "policy.toml")
            (self.disk(site) / "policy.toml").write_text(self.policies[site])
        if self.secure:
            identity(site)
            files = {"authority": "ca.crt", "certificate": f"{site}.crt", "key": f"{site}.key"}
            settings |= {name: str(authority_folder() / file) for name, file in files.items()}
        app = client_app(self.method, self.task, lambda node: self.data(self.names.index(site)))
        return self.grid.start(app, **settings)

    def _deliver(self, node, message, answer):
        self.received.append((node.settings["site"], message.metadata.message_type, content_of(message)))
        reply = super()._deliver(node, message, answer)
        if reply is not None:
            self.sent.append((node.settings["site"], message.metadata.message_type, content_of(reply)))
        return reply

    def serve(self, rounds, **options):
        return super().serve(rounds, secure=self.secure, **options)

    def texts(self, site, kind=""):
        """The texts of a site's replies to messages of this kind."""
        return [data.decode(errors="replace") for name, of, data in self.sent if name == site and of.startswith(kind)]
