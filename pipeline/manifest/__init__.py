"""Records of what was made: digests, receipts, the manifest, where they are kept and how two differ.

A record is readable without the means of making it, so this room knows neither kernels nor container.
"""
