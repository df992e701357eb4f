"""A scoring process keeps the variables that connections and caches need, and no variable with a secret."""

import os
from unittest.mock import patch

import pytest

from asyncrl.config.schema import EnvironmentSection
from asyncrl.environments.scoring_process import ScoringProcess
from asyncrl.environments.secrets import Secrets


def kept(name: str) -> bool:
    process = ScoringProcess(EnvironmentSection(), secrets=Secrets(), output=print)
    return name in process._environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTPS_PROXY", "http://proxy.example:3128"),
        ("http_proxy", "proxy.example:3128"),
        ("all_proxy", "socks5://10.0.0.1:1080"),
        ("no_proxy", "localhost,.example"),
        ("REQUESTS_CA_BUNDLE", "/etc/ca.pem"),
        ("CURL_CA_BUNDLE", "/etc/ca.pem"),
        ("SSL_CERT_DIR", "/etc/certs"),
        ("HF_HOME", "/data/hf"),
        ("HF_HUB_OFFLINE", "1"),
        ("HF_DATASETS_CACHE", "/data/sets"),
        ("XDG_CACHE_HOME", "/data/cache"),
        ("TORCH_HOME", "/data/torch"),
    ],
)
def test_proxies_certificates_and_caches_are_kept(name: str, value: str) -> None:
    with patch.dict(os.environ, {name: value}):
        assert kept(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "hf_abc"),
        ("HUGGING_FACE_HUB_TOKEN", "hf_abc"),
        ("OPENAI_API_KEY", "sk-abc"),
        ("HTTPS_PROXY", "http://user:password@proxy.example:3128"),
        ("http_proxy", "user:password@proxy.example:3128"),
        ("ALL_PROXY", "socks5://token@proxy.example"),
        ("HF_ENDPOINT", "https://user:password@mirror.example"),
    ],
)
def test_tokens_and_urls_with_a_password_are_withheld(name: str, value: str) -> None:
    with patch.dict(os.environ, {name: value}):
        assert not kept(name)
