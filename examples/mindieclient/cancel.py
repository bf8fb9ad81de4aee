"""Ending a request early: spec 4.4.7."""

import sys

from utils import create_client

from mindieclient.python.common import Log

logger = Log(__name__).getlog()
if __name__ == "__main__":
    # get argument and create client
    try:
        mindie_client = create_client()
    except Exception:
        logger.exception("Client Creation falied!")
        sys.exit(1)
    # create input
    prompt = "My name is Olivier and I"
    model_name = "llama_65b"
    parameters = {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 10,
        "top_p": 0.9,
        "truncate": 5,
        "typical_p": 0.9,
        "seed": 1,
        "repetition_penalty": 1,
        "watermark": True,
        "details": True,
    }
    # apply model inference
    results = mindie_client.generate_stream(
        model_name,
        prompt,
        request_id="1",
        parameters=parameters,
    )
    generated_text = ""
    index = 0
    for cur_res in results:
        index += 1  # noqa: SIM113  (the sample as published)
        if index == 10:
            flag = mindie_client.cancel(model_name, "1")
            if flag:
                logger.info("Test cancel api succeed!")
                sys.exit(0)
            else:
                logger.error("Test cancel api failed!")
                sys.exit(1)
        logger.info("current result: %s", cur_res)
