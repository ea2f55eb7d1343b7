"""Turns a published parent checkpoint into its child: recipe -> plan -> bytes -> manifest.

The plan is the whole answer except the bytes. From headers alone every output header, name, dtype, shape,
offset, index entry, config entry and file size is computed; running fills bytes into known places.
"""
