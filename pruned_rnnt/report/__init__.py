"""`pruned-rnnt report RUN`: one HTML page of a run, which needs no server and no network.

Charts are matplotlib's SVG, whose colours the page sets for light and dark; tables are JSON that
the page sorts, filters and divides into pages.

| module | content |
| --- | --- |
| `report_run` | reads a run's folder: configuration, metrics, result files |
| `scored_set` | a result with its errors: by utterance, duration, speaker and word |
| `comparison` | two comparable results of the same set, with the significance of the difference |
| `training_charts`, `charts` | curves and bars as SVG |
| `clips` | audio, and pictures of spectrogram and lattice, up to a size limit |
| `ranges` | outlier channels of the encoder |
| `tables` | the tables of the page as columns |
| `set_section` | the part of the page about one set: charts, tables, worst utterances |
| `page` | the page from its template |
"""
