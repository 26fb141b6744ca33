"""What a model folder holds: headers, config, size, integrity, tokenizer, and what was really quantized."""
