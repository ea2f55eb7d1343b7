"""Is a served checkpoint as good as the one it was made from: claims with error bars, asked over HTTP alone.

`record` asks a server everything that a protocol holds and keeps the raw answers; `compare` judges two records;
`plan` says what number of positions decides. Parent and child hardly ever run at the same time on one machine, so
nothing here needs both. The client holds no weights and no GPU.
"""
