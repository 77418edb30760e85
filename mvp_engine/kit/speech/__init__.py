"""Speech as codes: codecs that turn waveforms into codes and back, and the cache of codes of a dataset."""
