"""What happens in a rank when it imports a framework: hooks run, and no garbage is collected.

The hooks' functions belong to other rooms, and are imported only with the module that they change;
`patches` is what they change it with.
"""
