"""The paper's evaluation. The library does not import it.

=======================================  ===========================================================
``commands``                             the commands of ``isda``, one file each
``recipes``, ``settings``                the paper's recipes, and the fields of a recipe
``own_images``                           the default recipe for your own images
``published``                            every number that the paper prints
``data``                                 images, augmentation, random numbers
``networks``                             the paper's networks, models of timm and torchvision, and
                                         your own
``losses``                               the losses that ISDA is compared with
``training``                             the loop, the step, run folders
``generators``                           GANs, and pictures of augmented features
``records``, ``metrics_lines``,          files with results, and how they are checked
``predictions``, ``calibration``,
``cost_records``
``report``                               tables, figures and pages made from records
``temperature``, ``theoretical_cost``    temperature scaling, and the theoretical cost of Table 1
``recipe_checks``, ``errors``,           what the other modules share
``files``
=======================================  ===========================================================
"""
