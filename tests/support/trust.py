"""Sites in memory with policies and keys, and everything that they send."""

from dataclasses import dataclass, field

from consilience.flower.messages import packed_records
from support.flower_grid import World


def content_of(message):
    """All bytes of a message: its payload and its packed records; of an error its text."""
    if message.has_error():
        return (message.error.reason or "").encode()
    payload = message.content.config_records["payload"]["json"].encode()
    return payload + b"".join(packed_records(message.content).values())


@dataclass
class Sites(World):
    """A `World` whose sites have the `policies`, TOML texts by name. `sent` are (site, kind of message, bytes) of all
    replies, and `received` of all requests."""

    policies: dict[str, str] = field(default_factory=dict)
    sent: list[tuple[str, str, bytes]] = field(default_factory=list)
    received: list[tuple[str, str, bytes]] = field(default_factory=list)

    def settings(self, site):
        if site not in self.policies:
            return super().settings(site)
        self.disk(site).mkdir(parents=True, exist_ok=True)
        policy = self.disk(site) / "policy.toml"
        policy.write_text(self.policies[site])
        return {**super().settings(site), "policy": str(policy)}

    def _deliver(self, node, message, answer):
        self.received.append((node.settings["site"], message.metadata.message_type, content_of(message)))
        reply = super()._deliver(node, message, answer)
        if reply is not None:
            self.sent.append((node.settings["site"], message.metadata.message_type, content_of(reply)))
        return reply

    def texts(self, site, kind=""):
        """The texts of a site's replies to messages of this kind."""
        return [data.decode(errors="replace") for name, of, data in self.sent if name == site and of.startswith(kind)]
