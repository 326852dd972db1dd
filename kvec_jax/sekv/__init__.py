"""Summaries of semantic spans on the device, low-rank detail on the host: SeKV, https://arxiv.org/abs/2606.31145."""
