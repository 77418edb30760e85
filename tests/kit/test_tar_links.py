"""Links in tar shards: `tar` writes the second name of a file as a link, which has the content of the first."""

import io
import tarfile

import pytest
from conftest import user_error

from mvp_engine.kit.data.read.shards import Stream
from mvp_engine.kit.data.read.sources import open_source


def shard(file, links):
    """Two samples, of which the first has an image, and links: name -> (type, target)."""
    with tarfile.open(file, "w") as tar:
        for name, data in (("./a/1.txt", b"one"), ("./a/1.png", b"PNG"), ("./a/2.txt", b"two")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name, (kind, target) in links.items():
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = target
            tar.addfile(member)
    return file


@pytest.mark.parametrize(
    "kind, target", [(tarfile.LNKTYPE, "a/1.png"), (tarfile.SYMTYPE, "../a/./1.png")]
)
def test_tar_shard_linked_member_has_the_content_of_its_target(tmp_path, kind, target):
    again = "2.png" if kind == tarfile.SYMTYPE else "a/2.png"  # a link to a link
    source = open_source(
        shard(tmp_path / "s.tar", {"./a/2.png": (kind, target), "./a/3.png": (kind, again)})
    )
    assert [source[i] for i in range(3)] == [
        {"text": "one", "images": [b"PNG"]},
        {"text": "two", "images": [b"PNG"]},
        {"images": [b"PNG"]},
    ]
    assert source.where(2) == "s.tar:./a/3"


@pytest.mark.parametrize("target", ["a/9.png", "a/2.png", "a"])
def test_tar_shard_link_without_content_is_a_user_error(tmp_path, target):
    with user_error(r"a/2.png is a link to .*tar --dereference"):
        open_source(shard(tmp_path / "s.tar", {"./a/2.png": (tarfile.LNKTYPE, target)}))


def test_stream_with_a_linked_member_is_a_user_error(tmp_path):
    stream = Stream(
        "s", str(shard(tmp_path / "s.tar", {"./a/2.png": (tarfile.LNKTYPE, "a/1.png")}))
    )
    with user_error(r"a/2.png is a link, which a stream cannot follow: set stream: false"):
        list(stream)
