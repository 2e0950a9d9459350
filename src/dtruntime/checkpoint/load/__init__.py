"""Loads: which checkpoint (`checkpoint_loader`), and its bytes, checked (`pack_reader`);
`array_slices` reads boxes of arrays, `verify` everything.
"""
