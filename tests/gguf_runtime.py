"""What llama.cpp writes: a script for the python that has xllamacpp. `tests/test_gguf.py` calls it.

    python gguf_runtime.py MODEL.gguf MMPROJ.gguf|- REQUESTS.json

Prints the answers as JSON: of {"prompt": token ids} by /completion, of {"messages": ...} by /v1/chat/completions.
"""

import json
import sys
import urllib.request

import xllamacpp


def main(model, mmproj, requests):
    params = xllamacpp.CommonParams()
    params.model.path = model
    if mmproj != "-":
        params.mmproj.path = mmproj
        params.mmproj_use_gpu = False
    params.n_ctx = 1024
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.n_gpu_layers = 0
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for name in ("cache_type_k", "cache_type_v"):
        setattr(params, name, xllamacpp.ggml_type.GGML_TYPE_F32)
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    server = xllamacpp.Server(params)
    address = server.listening_address
    with open(requests) as file:
        asked = json.load(file)
    answers = []
    for one in asked:
        path = "/completion" if "prompt" in one else "/v1/chat/completions"
        request = urllib.request.Request(
            address + path, json.dumps(one).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answers.append(json.load(answer))
    print("ANSWERS" + json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
