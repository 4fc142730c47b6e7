from __future__ import annotations

import json

from proxykv_hf import CacheReport


def report(**kwargs):
    values = {
        "seen_tokens": [1000],
        "kept_tokens": [[[250, 350], [300, 300]]],
        "bytes_full": 64_000_000,
        "bytes_kept": 19_200_000,
        "bytes_peak": 70_500_000,
        "bytes_peak_proxy": 0,
        "seconds": {"prefill": 1.234, "wait": 0.5},
        "devices": {"target": "cuda:0"},
        "fallback": None,
    }
    return CacheReport(**values | kwargs)


def test_a_report_prints_tokens_bytes_seconds_and_devices():
    assert str(report()) == (
        "tokens   1000 seen, 30.0 % of their KV pairs kept\n"
        "KV       19.2 MB of 64.0 MB, peak 70.5 MB\n"
        "seconds  prefill 1.23, wait 0.50\n"
        "devices  target on cuda:0"
    )
    assert ", peak 70.5 MB, the proxy's 3.0 MB\n" in str(report(bytes_peak_proxy=3_000_000))
    many = report(seen_tokens=[10] * 12, kept_tokens=[[[5, 5]]] * 12, bytes_kept=12, bytes_full=2_500, bytes_peak=3e9)
    assert "10, 10, 10, 10, 10, 10, 10, 10, … (12 rows) seen, 50.0 %" in str(many)
    assert "12 bytes of 2.5 kB, peak 3.00 GB" in str(many)
    assert str(report(fallback="kvzip: boom")).endswith("fallback uncompressed: kvzip: boom")
    assert "100.0 %" in str(report(seen_tokens=[], kept_tokens=[]))


def test_a_report_survives_json():
    assert json.loads(json.dumps(report().to_dict()))["kept_tokens"] == [[[250, 350], [300, 300]]]
