"""Slow numpy oracles, written from the papers' formulas; nothing here uses an operation of the library.

``forward`` runs one unpadded prompt through a decoder in float64, ``scores`` and ``policies`` say what each method
keeps of it, ``budgets`` how places are divided. Loops are preferred to cleverness.
"""
