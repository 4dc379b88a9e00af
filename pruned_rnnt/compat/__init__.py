"""Other projects' transducer losses with their own names, argument order and corner behaviour.

| module | stands in for |
| --- | --- |
| `k2` | `k2` and `fast_rnnt`: simple, smoothed, pruned and full loss, ranges, pruning, recursions |
| `torchaudio` | `torchaudio.functional.rnnt_loss`, `torchaudio.transforms.RNNTLoss` |
| `warp_rnnt` | `warp_rnnt.rnnt_loss` |
| `optimized_transducer` | `optimized_transducer.transducer_loss`, `TransducerLoss` |
| `nemo_loss` | adds `loss_name: pruned_rnnt` to NVIDIA NeMo |
| `transformers_loss` | the RNN-T loss of Hugging Face transformers' `ParakeetForRNNT` |

`from pruned_rnnt.compat import k2` instead of `import k2` is the whole change in a recipe. Nothing
here computes a loss of its own: the functions translate arguments and layouts.
"""
