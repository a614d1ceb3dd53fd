"""A chat question whose answer does not hang on rounding, for tests that quote what the embedded model says.

Kernels may sum in another order, and weights and KV may take other number formats. Where the two likeliest tokens
nearly tie, that alone gives another text, which is wrong in no way that such a test means to test. "What is the capital
of France?" is a trap of that kind: "The" leads "L" by 0.48 nats on AVX-512, by 0.08 in float32, and on AVX2, as with
``--quantization int8``, the answer is "L'Étoile ...".

Here the likeliest token leads the second clearly at every token of the answer, the end token included. The least of
the eight leads, measured on a CPU with AVX-512: 2.24 nats by default (4-bit weights, KV int8), 2.38 with ``--dtype
float32``, 2.43 with ``bfloat16``, 2.50 with ``--quantization int8``, 2.38 with ``--kernels torch``, 2.25 with
``portable``, 2.18 with ``avx2``. ``test_default_types.py`` asks for ``LEAST_LEAD``, so that what erodes the lead is
seen there.

Completions that tests quote are as sure: with all these settings " Paris" after "The capital of France is" leads by
about 2.4 or more, and each token that counts on after "1, 2, 3," by about 3 or more.
"""

QUESTION = "Complete the sentence: The capital of Japan is"
ANSWER = "The capital of Japan is Tokyo."
MESSAGES = [{"role": "user", "content": QUESTION}]

PROMPT_TOKENS = 39  # with the chat template
ANSWER_TOKENS = 8  # with the end token
TOTAL_TOKENS = PROMPT_TOKENS + ANSWER_TOKENS
LEAST_LEAD = 1.0  # nats
