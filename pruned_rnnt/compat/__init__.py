"""Other projects' transducer losses with their own names, argument order and corner behaviour.

| module | replaces |
| --- | --- |
| `k2` | `k2`: simple, smoothed, pruned and full loss, ranges, pruning, recursions, RaggedTensor |
| `fast_rnnt` | `fast_rnnt`: the same losses, in its argument order |
| `torchaudio` | `torchaudio.functional.rnnt_loss`, `torchaudio.transforms.RNNTLoss` |
| `warprnnt_pytorch` | `warprnnt_pytorch.rnnt_loss`, `RNNTLoss` |
| `warp_rnnt` | `warp_rnnt.rnnt_loss`, `RNNTLoss` |
| `optimized_transducer` | `optimized_transducer.transducer_loss`, `TransducerLoss` |
| `nemo_loss` | adds `loss_name: pruned_rnnt` to NVIDIA NeMo |
| `transformers_loss` | the RNN-T loss of Hugging Face transformers' `ParakeetForRNNT` |

In a recipe, replace `import k2` by `from pruned_rnnt.compat import k2`; docs/compat.md lists the
differences. These modules only translate arguments and layouts for this package's losses. Other
names of k2 and torchaudio come from the installed packages.
"""
