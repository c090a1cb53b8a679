"""Who may look at a run: the person with the link, from the page itself, and nobody else."""

from __future__ import annotations

import pytest

from tests.viewer.served import TOKEN
from verl.viewer.api import page_files

HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store"}


def cookie_of(site):
    return site.send(f"/?token={TOKEN}", token=None).headers["set-cookie"].partition(";")[0]


def test_the_link_becomes_a_cookie_that_no_script_can_read(site):
    reply = site.send(f"/?token={TOKEN}", token=None)
    assert (reply.status, reply.headers["location"]) == (303, "/")
    name, *flags = reply.headers["set-cookie"].split("; ")
    assert {flag.lower() for flag in flags} == {"httponly", "samesite=strict", "path=/"}
    assert TOKEN not in name and str(site.port) in name
    assert site.send("/api/runs", token=None, cookie=name).status == 200


@pytest.mark.parametrize("path", ["/", "/api/runs", "/page/index.html", "/api/nothing", "/elsewhere"])
@pytest.mark.parametrize("headers", [{}, {"cookie": "verl_viewer_1=right"}, {"authorization": "Bearer wrong"}])
def test_without_the_secret_nothing_is_shown(site, path, headers):
    reply = site.send(path, token=None, **headers)
    assert reply.status == 401 and set(reply.json) == {"error"}


def test_a_link_with_a_wrong_token_gives_no_cookie(site):
    reply = site.send("/?token=wrong", token=None)
    assert reply.status == 401 and "set-cookie" not in reply.headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.168.0.1"])
@pytest.mark.parametrize("path", ["/api/runs", f"/?token={TOKEN}"])
def test_another_name_of_this_machine_is_refused(site, host, path):
    assert site.send(path, host=host).status == 403


def test_a_tunnel_from_another_port_learns_which_one_to_forward(site):
    reply = site.send("/api/runs", host=f"127.0.0.1:{site.port + 1}")
    assert reply.status == 403 and f"ssh -L {site.port}:127.0.0.1:{site.port}" in reply.body.decode()


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec_fetch_site": "cross-site"},
     {"sec_fetch_site": "same-site", "sec_fetch_mode": "cors"}],
)  # fmt: skip
def test_a_page_of_another_site_is_refused_although_the_cookie_comes_along(site, headers):
    assert site.send("/api/runs", token=None, cookie=cookie_of(site), **headers).status == 403


def test_another_port_of_this_machine_is_another_site(site):
    origin = f"http://127.0.0.1:{site.port + 1}"
    assert site.send("/api/runs", token=None, cookie=cookie_of(site), origin=origin).status == 403


def test_the_page_itself_and_a_link_that_is_followed_are_let_in(site):
    page = {"origin": f"http://127.0.0.1:{site.port}", "sec_fetch_site": "same-origin"}
    assert site.send("/api/runs", token=None, cookie=cookie_of(site), **page).status == 200
    link = {"sec_fetch_site": "same-site", "sec_fetch_mode": "navigate"}
    assert site.send("/api/runs", token=None, cookie=cookie_of(site), **link).status == 200


@pytest.mark.parametrize("path", ["/api/runs", "/api/nothing", "/page/nothing.js", f"/?token={TOKEN}", "/?token=wrong"])
def test_every_answer_forbids_what_is_not_of_the_page(site, path):
    headers = site.send(path).headers
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert {name: headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize(
    "name", ["../__init__.py", "..%2F__init__.py", "%2e%2e/api.py", "/etc/passwd", "index.html%00", "nothing.js"]
)
def test_only_files_of_the_page_are_served(site, name):
    assert site.send(f"/page/{name}").status == 404


def test_a_link_among_the_files_of_the_page_is_left_out(tmp_path):
    (tmp_path / "vendor").mkdir()
    (tmp_path / "index.html").write_text("<p>")
    (tmp_path / "vendor" / "a.js").write_text("1")
    (tmp_path / "link.txt").symlink_to("/etc/passwd")
    assert set(page_files(tmp_path)) == {"index.html", "vendor/a.js"}


def test_the_code_of_the_page_stays_small_enough_to_read():
    lines = {name: len(file.read_text().splitlines()) for name, file in page_files().items() if "vendor" not in name}
    assert sum(lines.values()) <= 1500 and {"app.js", "style.css", "index.html"} <= lines.keys()
