"""Status of server and model: spec 4.4.6."""

import json
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
    model_name = "llama_65b"
    if mindie_client.is_server_live():
        logger.info("The server is alive!")
    else:
        logger.error("The server is not alive!")
        sys.exit(1)
    if mindie_client.is_server_ready():
        logger.info("The server is ready!")
    else:
        logger.error("The server is not ready!")
        sys.exit(1)
    if mindie_client.is_model_ready(model_name):
        logger.info("The model is ready!")
    else:
        logger.error("The model is not ready!")
        sys.exit(1)
    server_metadata_dict = mindie_client.get_server_metadata()
    logger.info("get_server_metadata: %s", json.dumps(server_metadata_dict))
    model_metadata_dict = mindie_client.get_model_metadata(model_name)
    logger.info("get_model_metadata: %s", json.dumps(model_metadata_dict))
    model_config_dict = mindie_client.get_model_config(model_name)
    logger.info("get_model_config: %s", json.dumps(model_config_dict))
    # get slots
    result = mindie_client.get_slot_count(model_name)
    logger.info("gets_slot_count: %s", result.get_response())
