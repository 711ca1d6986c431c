"""The family table for planning: model types, GGUF names and the rule that turns their fields into cache layers."""

from __future__ import annotations

from dataclasses import replace

from kvist.spec.rules import (
    GATED_DELTA,
    KIMI_DELTA,
    LIGHTNING,
    MAMBA1,
    MAMBA2_FALCON,
    MAMBA2_GRANITE,
    MAMBA2_NEMOTRON,
    MAMBA2_ZAMBA,
    MAX_POSITION,
    RG_LRU,
    SHORT_CONV,
    Blocks,
    CacheRule,
    Coded,
    CrossRule,
    Every,
    Halves,
    Indexed,
    IndexRule,
    Offset,
    Periodic,
    StateRule,
    Windowed,
)

PLAIN = CacheRule()
WIDE = CacheRule(head_dim_given=True)
LATENT = CacheRule(latent=True)
SPARSE_LATENT = CacheRule(latent=True, index=IndexRule("index_head_dim", "indexer_types", "full"))
WINDOWED = CacheRule(Windowed())
GATED_WINDOW = CacheRule(Windowed("use_sliding_window", "max_window_layers"))
WIDE_GATED_WINDOW = replace(GATED_WINDOW, head_dim_given=True)
ENCODER = CacheRule(encoder_only=True)
DELTA_HYBRID = CacheRule(Periodic(4, ("full_attention_interval",), other="gdn"), head_dim_given=True, state=GATED_DELTA)
SHARED_TAIL = CacheRule(Periodic(5), head_dim_given=True, window_given=True, shared_tail="num_kv_shared_layers")

Row = tuple[str, tuple[str, ...], tuple[str, ...], CacheRule]

# (name, model types, GGUF architectures, rule). GPT-J, NeoX, Bloom and their like differ in everything but their cache.
ROWS: tuple[Row, ...] = (
    ("gptj", ("gpt-sw3", "gpt_sw3", "gptj", "codegen", "biogpt"), ("gptj",), PLAIN),
    ("gpt_neox_japanese", ("gpt_neox_japanese",), (), PLAIN),
    ("gpt_bigcode", ("gpt_bigcode",), ("starcoder",), CacheRule(one_kv_head=("multi_query", True, None))),
    (
        "gpt_neo",
        ("gpt_neo",),
        (),
        CacheRule(Coded("attention_layers", {"global": "full", "local": "swa"}), window=("window_size",)),
    ),
    ("opt", ("opt", "xglm"), (), PLAIN),
    ("bloom", ("bloom",), ("bloom",), PLAIN),
    ("mpt", ("mpt",), ("mpt",), PLAIN),
    ("dbrx", ("dbrx",), ("dbrx",), PLAIN),
    (
        "mllama",
        ("mllama_text_model", "mllama"),
        ("mllama",),
        CacheRule(cross=CrossRule(layers="cross_attention_layers")),
    ),
    (
        "llama4",
        ("llama4_text", "llama4"),
        ("llama4",),
        CacheRule(
            Coded(
                "no_rope_layers",
                {1: "chunk", 0: "full"},
                fallback=Periodic(4, ("no_rope_layer_interval",), other="chunk"),
            ),
            head_dim_given=True,
            chunk="attention_chunk_size",
        ),
    ),
    ("nemotron_nas", ("nemotron-nas", "deci"), ("deci",), CacheRule(Blocks("block_configs"))),
    ("nemotron", ("nemotron",), ("nemotron",), PLAIN),
    ("ministral", ("ministral",), (), replace(WINDOWED, window_given=True)),
    ("phimoe", ("phimoe",), ("phimoe",), WINDOWED),
    ("ministral3", ("ministral3", "mistral3", "mistral4_text"), ("mistral3",), replace(WINDOWED, head_dim_given=True)),
    ("mistral4", ("mistral4",), (), LATENT),
    (
        "qwen2_moe",
        ("qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_audio"),
        ("qwen2moe", "qwen2vl"),
        GATED_WINDOW,
    ),
    (
        "qwen3_vl",
        ("qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "mimo"),
        ("qwen3moe", "qwen3vl", "qwen3vlmoe", "mimo"),
        WIDE_GATED_WINDOW,
    ),
    (
        "qwen3_next",
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        ("qwen3next", "qwen35", "qwen35moe"),
        DELTA_HYBRID,
    ),
    ("paligemma", ("paligemma",), (), WIDE),
    ("gemma3n", ("gemma3n", "gemma3n_text"), ("gemma3n",), SHARED_TAIL),
    (
        "gemma4",
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        ("gemma4",),
        replace(
            SHARED_TAIL,
            pattern=Periodic(6),
            overrides={"full": ("global_head_dim", "global_head_dim", "num_global_key_value_heads")},
            override_if="attention_k_eq_v",
        ),
    ),
    ("phi", ("phi", "phi-msft"), ("phi2",), PLAIN),
    ("phi4_multimodal", ("phi4_multimodal", "phi4mm"), (), WINDOWED),
    ("phi4flash", ("phi4flash",), (), CacheRule(Halves("mb_per_layer"), state=MAMBA1, window_given=True)),
    (
        "deepseek_vl_v2",
        ("deepseek_vl_v2", "kimi_k2", "kimi_k25", "kimi_vl"),
        ("deepseek2", "minicpm3"),
        LATENT,
    ),
    ("deepseek_v32", ("deepseek_v32", "glm_moe_dsa"), ("glm-dsa",), SPARSE_LATENT),
    ("deepseek_v4", ("deepseek_v4",), (), CacheRule(vectors="compress_ratios", head_dim_given=True, window_given=True)),
    (
        "kimi_linear",
        ("kimi_linear", "kimi_k3"),
        ("kimi-linear",),
        CacheRule(Indexed("linear_attn_config.full_attn_layers", base=1, other="kda"), latent=True, state=KIMI_DELTA),
    ),
    ("longcat_flash", ("longcat_flash",), (), CacheRule(layers=("num_layers",), latent=True, sublayers=2)),
    ("glm4", ("glm", "glm4", "glm4_moe", "glm4v", "glm4v_moe", "glm4v_text"), ("glm4", "glm4moe"), WIDE),
    (
        "chatglm",
        ("chatglm",),
        ("chatglm",),
        CacheRule(kv_heads=("multi_query_group_num",), kv_heads_if="multi_query_attention"),
    ),
    ("gpt_oss", ("gpt_oss",), ("gpt-oss",), CacheRule(Periodic(2), head_dim_given=True, window_given=True)),
    (
        "granitemoe",
        ("granitemoe", "granitemoeshared", "olmo", "cohere", "persimmon"),
        ("granitemoe", "olmo", "olmoe", "command-r"),
        PLAIN,
    ),
    ("cohere2", ("cohere2",), ("cohere2",), CacheRule(Periodic(4), window_given=True)),
    ("olmo3", ("olmo3",), ("olmo3",), CacheRule(Periodic(4), window_given=True)),
    ("exaone4", ("exaone4",), ("exaone4",), CacheRule(Periodic(4))),
    (
        "laguna",
        ("laguna", "afmoe", "step3p7", "step3p7_text"),
        ("laguna", "afmoe"),
        CacheRule(Coded("layer_types", {}), head_dim_given=True, window_given=True),
    ),
    (
        "granitemoehybrid",
        ("granitemoehybrid", "bamba"),
        ("granitehybrid",),
        CacheRule(Indexed("attn_layer_indices", other="mamba2"), state=MAMBA2_GRANITE),
    ),
    (
        "minicpm",
        ("minicpm", "arcee", "stablelm", "internlm2", "internlm3", "baichuan", "xverse"),
        ("minicpm", "arcee", "stablelm", "internlm2", "baichuan", "xverse"),
        PLAIN,
    ),
    (
        "apertus",
        (
            "apertus",
            "exaone",
            "dots1",
            "ernie4_5",
            "ernie4_5_moe",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "helium",
            "nanochat",
        ),
        ("apertus", "exaone", "dots1", "ernie4_5", "hunyuan-dense", "hunyuan-moe"),
        PLAIN,
    ),
    ("seed_oss", ("seed_oss", "cwm"), ("seed_oss",), WIDE),
    (
        "minimax",
        ("minimax", "minimax_text_01", "minimax_m1"),
        (),
        CacheRule(Coded("attn_type_list", {0: "lightning", 1: "full"}), head_dim_given=True, state=LIGHTNING),
    ),
    ("minimax_m2", ("minimax_m2",), ("minimax-m2",), WIDE),
    (
        "minimax_m3",
        ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
        (),
        CacheRule(
            head_dim_given=True,
            index=IndexRule(
                "sparse_attention_config.sparse_index_dim", "sparse_attention_config.sparse_attention_freq"
            ),
        ),
    ),
    (
        "jamba",
        ("jamba",),
        ("jamba",),
        CacheRule(Offset("attn_layer_period", "attn_layer_offset", other="mamba1"), state=MAMBA1),
    ),
    (
        "mamba",
        ("mamba", "falcon_mamba"),
        ("mamba",),
        CacheRule(
            Every("mamba1"),
            heads=(),
            state=StateRule(
                "mamba1",
                state=("expand", "hidden_size", "state_size"),
                channels=(("expand", "hidden_size"),),
                kernel="conv_kernel",
            ),
        ),
    ),
    (
        "mamba2",
        ("mamba2",),
        ("mamba2",),
        CacheRule(
            Every("mamba2"),
            heads=(),
            state=StateRule(
                "mamba2",
                state=("num_heads", "head_dim", "state_size"),
                channels=(("num_heads", "head_dim"), (2, "n_groups", "state_size")),
                kernel="conv_kernel",
            ),
        ),
    ),
    (
        "nemotron_h",
        ("nemotron_h",),
        ("nemotron_h", "nemotron_h_moe"),
        CacheRule(
            Coded("hybrid_override_pattern", {"M": "mamba2", "*": "full", "-": "none", "E": "none"}),
            head_dim_given=True,
            state=MAMBA2_NEMOTRON,
        ),
    ),
    (
        "falcon_h1",
        ("falcon_h1",),
        ("falcon-h1",),
        CacheRule(state=MAMBA2_FALCON, parallel_state=True, head_dim_given=True),
    ),
    (
        "zamba2",
        ("zamba2",),
        (),
        CacheRule(Indexed("hybrid_layer_ids", kind="hybrid", other="mamba2"), width_factor=2, state=MAMBA2_ZAMBA),
    ),
    (
        "lfm2",
        ("lfm2", "lfm2_moe", "lfm2_vl"),
        ("lfm2", "lfm2moe"),
        CacheRule(Indexed("full_attn_idxs", other="shortconv"), state=SHORT_CONV),
    ),
    (
        "recurrent_gemma",
        ("recurrent_gemma",),
        (),
        CacheRule(
            Coded("_block_types", {"recurrent": "rglru", "attention": "swa"}, cycled=True),
            state=RG_LRU,
            head_dim_given=True,
            window_given=True,
        ),
    ),
    (
        "mimo_v2",
        ("mimo_v2_flash", "mimo_v2"),
        ("mimo2",),
        CacheRule(
            Coded("hybrid_layer_pattern", {0: "full", 1: "swa"}),
            head_dim_given=True,
            window_given=True,
            v_head_dim=("v_head_dim",),
            overrides={"swa": ("swa_head_dim", "swa_v_head_dim", "swa_num_key_value_heads")},
        ),
    ),
    ("hunyuan", ("hunyuan",), (), CacheRule(share_every=("use_cla", "cla_share_factor"))),
    (
        "whisper",
        ("whisper",),
        (),
        CacheRule(
            layers=("decoder_layers",),
            heads=("decoder_attention_heads",),
            kv_heads=(),
            cross=CrossRule(tokens="max_source_positions"),
        ),
    ),
    (
        "bart",
        ("bart", "mbart", "marian", "m2m_100", "pegasus", "blenderbot", "nllb_moe"),
        (),
        CacheRule(layers=("decoder_layers",), heads=("decoder_attention_heads",), kv_heads=(), cross=CrossRule()),
    ),
    (
        "t5",
        ("t5", "mt5", "umt5", "longt5", "switch_transformers"),
        ("t5",),
        CacheRule(
            layers=("num_decoder_layers", "num_layers"),
            heads=("num_heads",),
            kv_heads=(),
            head_dim=("d_kv",),
            cross=CrossRule(),
        ),
    ),
    (
        "bert",
        (
            "bert",
            "roberta",
            "xlm-roberta",
            "distilbert",
            "electra",
            "albert",
            "mpnet",
            "deberta",
            "deberta-v2",
            "modernbert",
            "nomic_bert",
            "camembert",
            "ernie",
            "esm",
        ),
        ("bert", "nomic-bert", "jina-bert-v2", "modern-bert"),
        ENCODER,
    ),
)
POSITIONS = MAX_POSITION
