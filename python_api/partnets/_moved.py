"""Where modules were before version 0.2, by which pickled models and older programs name them."""

from partkernels._moved import alias

MOVED = {
    "partitioned": "nn.partitioned",
    "partitioned_layer": "nn.layer",
    "linear": "nn.linear",
    "conv2d": "nn.conv",
    "conv_transpose2d": "nn.conv_transpose",
    "embedding": "nn.embedding",
    "attention": "nn.attention",
    "recurrent": "nn.recurrent",
    "norms": "nn.norm",
    "batch_norms": "nn.batch_norm",
    "scalars": "nn.fixup",
    "transformers_conv1d": "nn.gpt2",
    "bare": "nn.broadcast",
    "state_dicts": "nn.state_dict",
    "recomputation": "nn.activation_checkpoint",
    "subnetwork": "nn.live",
    "noise": "utils.random_state",
    "partition": "convert.partitioning",
    "merge": "convert.merging",
    "finalize": "convert.finalizing",
    "partitioned_optimizer": "optim.base",
    "per_partition": "optim.per_partition",
    "decays": "optim.weight_decay",
    "chunks": "data.chunks",
    "loader": "data.loader",
    "lml": "evaluation.out_of_chunk",
    "trainer": "training.trainer",
    "history": "training.history",
    "plots": "training.plots",
    "selection": "training.best_model",
}


alias("partnets", MOVED)
